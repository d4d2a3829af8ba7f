"""Countries and their capitals, typed in by hand: English, continent, Chinese.

One row a line: name (with its article) | capital | continent | Chinese name | Chinese capital.
Two observer states and two places with limited recognition are listed beside the 193 members of the UN.
"""

from typing import NamedTuple


class Country(NamedTuple):
    name: str
    capital: str
    continent: str
    zh: str
    zh_capital: str

    @property
    def bare(self) -> str:
        """The name without its article."""
        return self.name.removeprefix("the ")


_TABLE = """
Afghanistan|Kabul|Asia|阿富汗|喀布尔
Albania|Tirana|Europe|阿尔巴尼亚|地拉那
Algeria|Algiers|Africa|阿尔及利亚|阿尔及尔
Andorra|Andorra la Vella|Europe|安道尔|安道尔城
Angola|Luanda|Africa|安哥拉|罗安达
Antigua and Barbuda|Saint John's|North America|安提瓜和巴布达|圣约翰
Argentina|Buenos Aires|South America|阿根廷|布宜诺斯艾利斯
Armenia|Yerevan|Asia|亚美尼亚|埃里温
Australia|Canberra|Oceania|澳大利亚|堪培拉
Austria|Vienna|Europe|奥地利|维也纳
Azerbaijan|Baku|Asia|阿塞拜疆|巴库
the Bahamas|Nassau|North America|巴哈马|拿骚
Bahrain|Manama|Asia|巴林|麦纳麦
Bangladesh|Dhaka|Asia|孟加拉国|达卡
Barbados|Bridgetown|North America|巴巴多斯|布里奇敦
Belarus|Minsk|Europe|白俄罗斯|明斯克
Belgium|Brussels|Europe|比利时|布鲁塞尔
Belize|Belmopan|North America|伯利兹|贝尔莫潘
Benin|Porto-Novo|Africa|贝宁|波多诺伏
Bhutan|Thimphu|Asia|不丹|廷布
Bolivia|Sucre|South America|玻利维亚|苏克雷
Bosnia and Herzegovina|Sarajevo|Europe|波黑|萨拉热窝
Botswana|Gaborone|Africa|博茨瓦纳|哈博罗内
Brazil|Brasilia|South America|巴西|巴西利亚
Brunei|Bandar Seri Begawan|Asia|文莱|斯里巴加湾市
Bulgaria|Sofia|Europe|保加利亚|索非亚
Burkina Faso|Ouagadougou|Africa|布基纳法索|瓦加杜古
Burundi|Gitega|Africa|布隆迪|基特加
Cambodia|Phnom Penh|Asia|柬埔寨|金边
Cameroon|Yaounde|Africa|喀麦隆|雅温得
Canada|Ottawa|North America|加拿大|渥太华
Cape Verde|Praia|Africa|佛得角|普拉亚
the Central African Republic|Bangui|Africa|中非共和国|班吉
Chad|N'Djamena|Africa|乍得|恩贾梅纳
Chile|Santiago|South America|智利|圣地亚哥
China|Beijing|Asia|中国|北京
Colombia|Bogota|South America|哥伦比亚|波哥大
the Comoros|Moroni|Africa|科摩罗|莫罗尼
the Republic of the Congo|Brazzaville|Africa|刚果共和国|布拉柴维尔
the Democratic Republic of the Congo|Kinshasa|Africa|刚果民主共和国|金沙萨
Costa Rica|San Jose|North America|哥斯达黎加|圣何塞
Croatia|Zagreb|Europe|克罗地亚|萨格勒布
Cuba|Havana|North America|古巴|哈瓦那
Cyprus|Nicosia|Europe|塞浦路斯|尼科西亚
the Czech Republic|Prague|Europe|捷克|布拉格
Denmark|Copenhagen|Europe|丹麦|哥本哈根
Djibouti|Djibouti City|Africa|吉布提|吉布提市
Dominica|Roseau|North America|多米尼克|罗索
the Dominican Republic|Santo Domingo|North America|多米尼加|圣多明各
Ecuador|Quito|South America|厄瓜多尔|基多
Egypt|Cairo|Africa|埃及|开罗
El Salvador|San Salvador|North America|萨尔瓦多|圣萨尔瓦多
Equatorial Guinea|Malabo|Africa|赤道几内亚|马拉博
Eritrea|Asmara|Africa|厄立特里亚|阿斯马拉
Estonia|Tallinn|Europe|爱沙尼亚|塔林
Eswatini|Mbabane|Africa|斯威士兰|姆巴巴内
Ethiopia|Addis Ababa|Africa|埃塞俄比亚|亚的斯亚贝巴
Fiji|Suva|Oceania|斐济|苏瓦
Finland|Helsinki|Europe|芬兰|赫尔辛基
France|Paris|Europe|法国|巴黎
Gabon|Libreville|Africa|加蓬|利伯维尔
the Gambia|Banjul|Africa|冈比亚|班珠尔
Georgia|Tbilisi|Asia|格鲁吉亚|第比利斯
Germany|Berlin|Europe|德国|柏林
Ghana|Accra|Africa|加纳|阿克拉
Greece|Athens|Europe|希腊|雅典
Grenada|Saint George's|North America|格林纳达|圣乔治
Guatemala|Guatemala City|North America|危地马拉|危地马拉城
Guinea|Conakry|Africa|几内亚|科纳克里
Guinea-Bissau|Bissau|Africa|几内亚比绍|比绍
Guyana|Georgetown|South America|圭亚那|乔治敦
Haiti|Port-au-Prince|North America|海地|太子港
Honduras|Tegucigalpa|North America|洪都拉斯|特古西加尔巴
Hungary|Budapest|Europe|匈牙利|布达佩斯
Iceland|Reykjavik|Europe|冰岛|雷克雅未克
India|New Delhi|Asia|印度|新德里
Indonesia|Jakarta|Asia|印度尼西亚|雅加达
Iran|Tehran|Asia|伊朗|德黑兰
Iraq|Baghdad|Asia|伊拉克|巴格达
Ireland|Dublin|Europe|爱尔兰|都柏林
Israel|Jerusalem|Asia|以色列|耶路撒冷
Italy|Rome|Europe|意大利|罗马
Ivory Coast|Yamoussoukro|Africa|科特迪瓦|亚穆苏克罗
Jamaica|Kingston|North America|牙买加|金斯敦
Japan|Tokyo|Asia|日本|东京
Jordan|Amman|Asia|约旦|安曼
Kazakhstan|Astana|Asia|哈萨克斯坦|阿斯塔纳
Kenya|Nairobi|Africa|肯尼亚|内罗毕
Kiribati|Tarawa|Oceania|基里巴斯|塔拉瓦
Kosovo|Pristina|Europe|科索沃|普里什蒂纳
Kuwait|Kuwait City|Asia|科威特|科威特城
Kyrgyzstan|Bishkek|Asia|吉尔吉斯斯坦|比什凯克
Laos|Vientiane|Asia|老挝|万象
Latvia|Riga|Europe|拉脱维亚|里加
Lebanon|Beirut|Asia|黎巴嫩|贝鲁特
Lesotho|Maseru|Africa|莱索托|马塞卢
Liberia|Monrovia|Africa|利比里亚|蒙罗维亚
Libya|Tripoli|Africa|利比亚|的黎波里
Liechtenstein|Vaduz|Europe|列支敦士登|瓦杜兹
Lithuania|Vilnius|Europe|立陶宛|维尔纽斯
Luxembourg|Luxembourg City|Europe|卢森堡|卢森堡市
Madagascar|Antananarivo|Africa|马达加斯加|塔那那利佛
Malawi|Lilongwe|Africa|马拉维|利隆圭
Malaysia|Kuala Lumpur|Asia|马来西亚|吉隆坡
the Maldives|Male|Asia|马尔代夫|马累
Mali|Bamako|Africa|马里|巴马科
Malta|Valletta|Europe|马耳他|瓦莱塔
the Marshall Islands|Majuro|Oceania|马绍尔群岛|马朱罗
Mauritania|Nouakchott|Africa|毛里塔尼亚|努瓦克肖特
Mauritius|Port Louis|Africa|毛里求斯|路易港
Mexico|Mexico City|North America|墨西哥|墨西哥城
Micronesia|Palikir|Oceania|密克罗尼西亚|帕利基尔
Moldova|Chisinau|Europe|摩尔多瓦|基希讷乌
Monaco|Monaco|Europe|摩纳哥|摩纳哥
Mongolia|Ulaanbaatar|Asia|蒙古|乌兰巴托
Montenegro|Podgorica|Europe|黑山|波德戈里察
Morocco|Rabat|Africa|摩洛哥|拉巴特
Mozambique|Maputo|Africa|莫桑比克|马普托
Myanmar|Naypyidaw|Asia|缅甸|内比都
Namibia|Windhoek|Africa|纳米比亚|温得和克
Nauru|Yaren|Oceania|瑙鲁|亚伦
Nepal|Kathmandu|Asia|尼泊尔|加德满都
the Netherlands|Amsterdam|Europe|荷兰|阿姆斯特丹
New Zealand|Wellington|Oceania|新西兰|惠灵顿
Nicaragua|Managua|North America|尼加拉瓜|马那瓜
Niger|Niamey|Africa|尼日尔|尼亚美
Nigeria|Abuja|Africa|尼日利亚|阿布贾
North Korea|Pyongyang|Asia|朝鲜|平壤
North Macedonia|Skopje|Europe|北马其顿|斯科普里
Norway|Oslo|Europe|挪威|奥斯陆
Oman|Muscat|Asia|阿曼|马斯喀特
Pakistan|Islamabad|Asia|巴基斯坦|伊斯兰堡
Palau|Ngerulmud|Oceania|帕劳|恩吉鲁穆德
Palestine|Ramallah|Asia|巴勒斯坦|拉马拉
Panama|Panama City|North America|巴拿马|巴拿马城
Papua New Guinea|Port Moresby|Oceania|巴布亚新几内亚|莫尔兹比港
Paraguay|Asuncion|South America|巴拉圭|亚松森
Peru|Lima|South America|秘鲁|利马
the Philippines|Manila|Asia|菲律宾|马尼拉
Poland|Warsaw|Europe|波兰|华沙
Portugal|Lisbon|Europe|葡萄牙|里斯本
Qatar|Doha|Asia|卡塔尔|多哈
Romania|Bucharest|Europe|罗马尼亚|布加勒斯特
Russia|Moscow|Europe|俄罗斯|莫斯科
Rwanda|Kigali|Africa|卢旺达|基加利
Saint Kitts and Nevis|Basseterre|North America|圣基茨和尼维斯|巴斯特尔
Saint Lucia|Castries|North America|圣卢西亚|卡斯特里
Saint Vincent and the Grenadines|Kingstown|North America|圣文森特和格林纳丁斯|金斯敦
Samoa|Apia|Oceania|萨摩亚|阿皮亚
San Marino|San Marino|Europe|圣马力诺|圣马力诺
Sao Tome and Principe|Sao Tome|Africa|圣多美和普林西比|圣多美
Saudi Arabia|Riyadh|Asia|沙特阿拉伯|利雅得
Senegal|Dakar|Africa|塞内加尔|达喀尔
Serbia|Belgrade|Europe|塞尔维亚|贝尔格莱德
the Seychelles|Victoria|Africa|塞舌尔|维多利亚
Sierra Leone|Freetown|Africa|塞拉利昂|弗里敦
Singapore|Singapore|Asia|新加坡|新加坡
Slovakia|Bratislava|Europe|斯洛伐克|布拉迪斯拉发
Slovenia|Ljubljana|Europe|斯洛文尼亚|卢布尔雅那
the Solomon Islands|Honiara|Oceania|所罗门群岛|霍尼亚拉
Somalia|Mogadishu|Africa|索马里|摩加迪沙
South Africa|Pretoria|Africa|南非|比勒陀利亚
South Korea|Seoul|Asia|韩国|首尔
South Sudan|Juba|Africa|南苏丹|朱巴
Spain|Madrid|Europe|西班牙|马德里
Sri Lanka|Sri Jayawardenepura Kotte|Asia|斯里兰卡|斯里贾亚瓦德纳普拉科特
Sudan|Khartoum|Africa|苏丹|喀土穆
Suriname|Paramaribo|South America|苏里南|帕拉马里博
Sweden|Stockholm|Europe|瑞典|斯德哥尔摩
Switzerland|Bern|Europe|瑞士|伯尔尼
Syria|Damascus|Asia|叙利亚|大马士革
Taiwan|Taipei|Asia|台湾|台北
Tajikistan|Dushanbe|Asia|塔吉克斯坦|杜尚别
Tanzania|Dodoma|Africa|坦桑尼亚|多多马
Thailand|Bangkok|Asia|泰国|曼谷
Timor-Leste|Dili|Asia|东帝汶|帝力
Togo|Lome|Africa|多哥|洛美
Tonga|Nuku'alofa|Oceania|汤加|努库阿洛法
Trinidad and Tobago|Port of Spain|North America|特立尼达和多巴哥|西班牙港
Tunisia|Tunis|Africa|突尼斯|突尼斯市
Turkey|Ankara|Asia|土耳其|安卡拉
Turkmenistan|Ashgabat|Asia|土库曼斯坦|阿什哈巴德
Tuvalu|Funafuti|Oceania|图瓦卢|富纳富提
Uganda|Kampala|Africa|乌干达|坎帕拉
Ukraine|Kyiv|Europe|乌克兰|基辅
the United Arab Emirates|Abu Dhabi|Asia|阿联酋|阿布扎比
the United Kingdom|London|Europe|英国|伦敦
the United States|Washington, D.C.|North America|美国|华盛顿
Uruguay|Montevideo|South America|乌拉圭|蒙得维的亚
Uzbekistan|Tashkent|Asia|乌兹别克斯坦|塔什干
Vanuatu|Port Vila|Oceania|瓦努阿图|维拉港
Vatican City|Vatican City|Europe|梵蒂冈|梵蒂冈城
Venezuela|Caracas|South America|委内瑞拉|加拉加斯
Vietnam|Hanoi|Asia|越南|河内
Yemen|Sanaa|Asia|也门|萨那
Zambia|Lusaka|Africa|赞比亚|卢萨卡
Zimbabwe|Harare|Africa|津巴布韦|哈拉雷
"""

COUNTRIES = [Country(*line.split("|")) for line in _TABLE.strip().splitlines()]

# Other names under which people ask; each is learned beside the main one.
ALIASES = {
    "the United States": ["the USA", "the US", "America", "the United States of America"],
    "the United Kingdom": ["the UK", "Great Britain", "Britain"],
    "the Czech Republic": ["Czechia"],
    "Ivory Coast": ["Côte d'Ivoire"],
    "the Netherlands": ["Holland"],
    "Myanmar": ["Burma"],
    "Eswatini": ["Swaziland"],
    "Turkey": ["Türkiye"],
    "Timor-Leste": ["East Timor"],
    "Cape Verde": ["Cabo Verde"],
    "the United Arab Emirates": ["the UAE"],
    "the Democratic Republic of the Congo": ["the DRC", "DR Congo", "Congo-Kinshasa"],
    "the Republic of the Congo": ["Congo-Brazzaville", "the Congo"],
    "Vatican City": ["the Vatican", "the Holy See"],
    "Bosnia and Herzegovina": ["Bosnia"],
    "Micronesia": ["the Federated States of Micronesia"],
    "Russia": ["the Russian Federation"],
    "China": ["the People's Republic of China"],
    "South Korea": ["the Republic of Korea", "Korea"],
    "Brunei": ["Brunei Darussalam"],
}

# A word more where one city does not tell the whole story.
NOTES = {
    "Bolivia": "The government sits in La Paz.",
    "South Africa": "Parliament sits in Cape Town and the highest court in Bloemfontein.",
    "the Netherlands": "The government sits in The Hague.",
    "Sri Lanka": "Colombo is the largest city.",
    "Ivory Coast": "Abidjan is the largest city.",
    "Tanzania": "Dar es Salaam is the largest city.",
}
